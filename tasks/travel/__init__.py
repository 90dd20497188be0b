"""Stages on other machines, which share with this one a store of objects and no folder."""

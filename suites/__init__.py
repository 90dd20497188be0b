"""Tasks that need no download: drawn images, and sentences from a grammar."""

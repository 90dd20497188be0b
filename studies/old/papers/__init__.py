"""The papers' experiments, one folder each: study, results, figures."""

"""The shelf of methods, one family a file. The catalog finds every function declared with `@method` here."""

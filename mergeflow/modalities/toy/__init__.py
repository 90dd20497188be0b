"""Small feed-forward nets on tasks drawn by formula: a whole pipeline in seconds, in float64 where rounding matters."""

"""Where texts and questions with choices come from."""

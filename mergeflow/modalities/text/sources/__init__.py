"""Where texts come from: files of rows, the Hugging Face hub, an embedded suite."""

"""One file per task: its classes and the code that draws them."""

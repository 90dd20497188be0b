"""The embedded corpus `books`: three generated books, two of them by one author, and text by ever other authors."""

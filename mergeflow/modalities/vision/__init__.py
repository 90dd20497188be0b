"""Images and the models that see them: open_clip models, zero-shot heads, embedded suites, data readers."""

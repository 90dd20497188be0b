"""What model folders say of themselves, compared before a merge: settings, tokens, templates, licences."""

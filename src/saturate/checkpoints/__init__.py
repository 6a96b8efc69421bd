"""Training state on disk: staged without tearing, written atomically, kept in pieces, checked. Runs in the user's process and behind the verbs."""

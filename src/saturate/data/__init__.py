"""Samples on disk: a cache of decoded ones, packed datasets. Runs in the user's process and behind the verbs."""

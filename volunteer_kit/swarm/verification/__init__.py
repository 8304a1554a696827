"""Convictions: `convictions` defines and counts them, `enforcement` makes this peer refuse convicted peers."""

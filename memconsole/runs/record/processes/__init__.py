"""Which processes of a run live: identities, locks and heartbeats."""

"""Commands about runs: launched, watched, stopped, reported, used."""

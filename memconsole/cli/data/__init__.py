"""Commands that inspect, measure and make data."""

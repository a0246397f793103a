"""Answers for the user from the estimates: remedies, fits, document lengths and calibration."""

"""What the numbers mean for a person: remedies, fits, reasons and calibration."""

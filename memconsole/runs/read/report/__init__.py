"""What is told of a run when it has ended: report, receipt, estimate against measurement."""

"""What a policy costs: documents to measure on, the measurement, its statistics, its table."""

"""What semantic deduplication is measured on: one workload a file, each a sequence of arrivals at a store."""

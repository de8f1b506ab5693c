"""What the benchmark commands share: starting servers, data, accounting by stage, results."""

"""Questions about one server that a workload's average doesn't answer, each in a module of its own."""

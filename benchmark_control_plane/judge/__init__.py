"""What is each system worth under load? Experiments from YAML, workloads, open-loop runs, their analysis."""

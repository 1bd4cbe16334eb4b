"""What the commands of `tandem` do, and how they print it; `controlplane.cli` parses their options."""

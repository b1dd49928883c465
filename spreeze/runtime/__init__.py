"""What the supervising process of a run does: decide, launch, watch, record, stop."""

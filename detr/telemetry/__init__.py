"""What a run measures about itself: metrics, timings, environment, and where they are written."""

"""Where degrees and schedules come from when nobody gave them."""

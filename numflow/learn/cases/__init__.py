"""Cases of ops and schedules, and the distance of two results: what labs and tests check with."""

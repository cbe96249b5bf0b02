"""Speed, measured as ratios in one process: interleaved repetitions, best and median, load average beside them."""

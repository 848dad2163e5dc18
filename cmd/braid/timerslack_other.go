//go:build !linux

package main

import "time"

// allowTimerSlack does nothing: only Linux lets a process choose.
func allowTimerSlack(time.Duration, string) error { return nil }

func timerSlack() time.Duration { return 0 }

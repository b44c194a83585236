"""Metrics: functions on pairs that were aligned once, one to one."""

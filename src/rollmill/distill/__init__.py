"""Offline on-policy distillation: recording a student's answers with a teacher's view of them."""

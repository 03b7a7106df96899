"""Plans, beside what ran here and what was published."""

"""All tests; a regular package, so that an unrelated `tests` among the installed packages cannot take its name."""

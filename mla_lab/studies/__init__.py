"""One-off measurements, each `python -m mla_lab.studies.NAME`; not part of the wheel."""

"""The workbook as a course: sessions, and grading of what students hand in."""

"""The workbook as a course: sessions, glossary, and grading of what students hand in."""

"""placeholder"""
class Checker:
    findings = []

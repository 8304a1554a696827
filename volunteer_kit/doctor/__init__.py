"""`volunteer-kit doctor [RUN]`: what would keep this machine from taking part, and the way out of each."""

from __future__ import annotations

from volunteer_kit.doctor.door import doctor
from volunteer_kit.doctor.finding import Finding, report

__all__ = ["Finding", "doctor", "report"]

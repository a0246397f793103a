"""All families of linear systems, by name."""

from __future__ import annotations

from memconsole_trainer.systems import aerospace, electronics, mechanics, robotics, vehicles
from memconsole_trainer.systems.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for field in (mechanics, electronics, vehicles, aerospace, robotics)
    for family in field.FAMILIES
}

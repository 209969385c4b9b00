"""The parts that a change of models' settings reaches, from a request or from the file."""

from dataclasses import dataclass

from modelrunner.models.configurations import Configurations
from modelrunner.models.resolve import Resolver
from modelrunner.models.validation import Validator
from modelrunner.scheduler import Scheduler
from modelrunner.store import Store


@dataclass(frozen=True, slots=True)
class SettingParts:
    store: Store
    scheduler: Scheduler
    configurations: Configurations
    resolver: Resolver
    validator: Validator

    def retain(self, model_id: str) -> None:
        """Applies the settings that never need another load to the model's present runners."""
        settings = self.configurations.settings
        for mode in self.scheduler.modes(model_id):
            self.scheduler.retain(model_id, mode, self.resolver.retained(settings.of(model_id, mode)))

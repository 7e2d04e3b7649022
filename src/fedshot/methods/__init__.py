"""The methods, by the names they have in configurations and tables.

`fedshot.methods()` lists them. Importing this package replaces the function `fedshot.methods` with
the package. The package can therefore be called, too, and returns the same list.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

from fedshot.methods.base.fedavg_probe import FedAvgProbe
from fedshot.methods.base.fedbabu import FedBABU
from fedshot.methods.base.fedmeta import FedMeta
from fedshot.methods.base.fl_proto import FLProto
from fedshot.methods.base.fsl_local import FSLLocal
from fedshot.methods.f2l.f2l import F2L
from fedshot.methods.fedfsl.fedfsl_mi import FedFSLMI
from fedshot.methods.fedfsl.fedfsl_mi_adv import FedFSLMIAdv
from fedshot.methods.fedfsl.fedfsl_naive import FedFSLNaive
from fedshot.methods.fedfsl.fedfsl_prox import FedFSLProx
from fedshot.methods.frl.frl import FRL
from fedshot.methods.frl.frl_fedavg import FRLFedAvg
from fedshot.methods.frl.frl_finetune import FRLFinetune
from fedshot.methods.frl.frl_frozen import FRLFrozen
from fedshot.methods.frl.frl_one_shot import FRLOneShot
from fedshot.methods.frl.frl_personal import FRLPersonal
from fedshot.methods.one_round.fed3r import FED3R
from fedshot.methods.one_round.fedcgs import FedCGS
from fedshot.methods.one_round.fedncm import FedNCM
from fedshot.methods.personal.ditto import Ditto
from fedshot.methods.personal.fedavg import FedAvg
from fedshot.methods.personal.fedfomo import FedFomo
from fedshot.methods.personal.fedproto import FedProto
from fedshot.methods.personal.fedprox import FedProx
from fedshot.methods.personal.fedrep import FedRep
from fedshot.methods.personal.heur_fedamp import HeurFedAMP
from fedshot.methods.personal.per_fedavg import PerFedAvg
from fedshot.methods.personal.pfedfsl import PFedFSL
from fedshot.methods.personal.pfedme import PFedMe
from fedshot.methods.registry import METHODS, register

__all__ = [  # noqa: RUF022  (the order in lists and messages)
    "FedAvgProbe", "FedBABU", "FedFSLNaive", "FedFSLProx", "FedFSLMI", "FedFSLMIAdv", "FedMeta",
    "F2L", "FLProto", "FRL", "FRLFedAvg", "FRLFinetune", "FRLFrozen", "FRLOneShot", "FRLPersonal",
    "FSLLocal", "FedNCM", "FedCGS", "FED3R", "FedAvg", "FedProx", "Ditto", "FedFomo", "FedProto",
    "FedRep", "HeurFedAMP", "PerFedAvg", "PFedMe", "PFedFSL", "METHODS", "register",
]  # fmt: skip
for _name in __all__[:-2]:
    register(globals()[_name])


class _CallablePackage(ModuleType):
    # Only `fedshot.api`, in a higher layer, can make the list. It is imported by name inside the
    # call, when all modules are loaded.
    def __call__(self) -> Any:
        return importlib.import_module("fedshot.api.listing").methods()


sys.modules[__name__].__class__ = _CallablePackage

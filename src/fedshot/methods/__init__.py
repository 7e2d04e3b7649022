"""The methods, by the names they have in configurations and tables."""

from typing import Any

from fedshot.methods.ditto import Ditto
from fedshot.methods.f2l import F2L
from fedshot.methods.fedavg import FedAvg
from fedshot.methods.fedavg_probe import FedAvgProbe
from fedshot.methods.fedbabu import FedBABU
from fedshot.methods.fedfomo import FedFomo
from fedshot.methods.fedfsl_mi import FedFSLMI
from fedshot.methods.fedfsl_mi_adv import FedFSLMIAdv
from fedshot.methods.fedfsl_naive import FedFSLNaive
from fedshot.methods.fedfsl_prox import FedFSLProx
from fedshot.methods.fedmeta import FedMeta
from fedshot.methods.fedproto import FedProto
from fedshot.methods.fedprox import FedProx
from fedshot.methods.fedrep import FedRep
from fedshot.methods.fl_proto import FLProto
from fedshot.methods.frl import FRL
from fedshot.methods.frl_fedavg import FRLFedAvg
from fedshot.methods.frl_finetune import FRLFinetune
from fedshot.methods.frl_frozen import FRLFrozen
from fedshot.methods.frl_one_shot import FRLOneShot
from fedshot.methods.frl_personal import FRLPersonal
from fedshot.methods.fsl_local import FSLLocal
from fedshot.methods.heur_fedamp import HeurFedAMP
from fedshot.methods.per_fedavg import PerFedAvg
from fedshot.methods.pfedfsl import PFedFSL
from fedshot.methods.pfedme import PFedMe

METHODS: dict[str, type[Any]] = {
    method.name: method
    for method in (
        FedAvgProbe,
        FedBABU,
        FedFSLNaive,
        FedFSLProx,
        FedFSLMI,
        FedFSLMIAdv,
        FedMeta,
        F2L,
        FLProto,
        FRL,
        FRLFedAvg,
        FRLFinetune,
        FRLFrozen,
        FRLOneShot,
        FRLPersonal,
        FSLLocal,
        FedAvg,
        FedProx,
        Ditto,
        FedFomo,
        FedProto,
        FedRep,
        HeurFedAMP,
        PerFedAvg,
        PFedMe,
        PFedFSL,
    )
}

__all__ = [
    "F2L",
    "FRL",
    "METHODS",
    "Ditto",
    "FLProto",
    "FRLFedAvg",
    "FRLFinetune",
    "FRLFrozen",
    "FRLOneShot",
    "FRLPersonal",
    "FSLLocal",
    "FedAvg",
    "FedAvgProbe",
    "FedBABU",
    "FedFSLMI",
    "FedFSLMIAdv",
    "FedFSLNaive",
    "FedFSLProx",
    "FedFomo",
    "FedMeta",
    "FedProto",
    "FedProx",
    "FedRep",
    "HeurFedAMP",
    "PFedFSL",
    "PFedMe",
    "PerFedAvg",
]

"""Connects training frameworks to Everstep with one or two lines of a script.

    everstep.integrations.accelerate      scripts with an accelerator of Hugging Face accelerate
    everstep.integrations.lightning       the Trainer of Lightning
    everstep.integrations.torchtitan      torchtitan, by a checkpoint manager that the job's configuration names
    everstep.integrations.transformers    the Trainer of Hugging Face transformers

Each module imports its framework, so import only the module of the framework that the script uses. A script with an
integration runs alone, under torchrun and under Everstep, unchanged.
"""

"""The only place for torch's underscore names, checked on torch 2.11 and 2.13; one file for each purpose.

``step`` has what every training step uses, the others what is needed around it. When a torch release moves one of these
names, only a file here changes. Ranks as threads are in ``torch_threads.py``.
"""

from shardwise.torch_internals.captures import *
from shardwise.torch_internals.compiler import *
from shardwise.torch_internals.dispatch import *
from shardwise.torch_internals.dtensor import *
from shardwise.torch_internals.groups import *
from shardwise.torch_internals.modules import *
from shardwise.torch_internals.process_wide import *
from shardwise.torch_internals.state_dict_functions import *
from shardwise.torch_internals.step import *
from shardwise.torch_internals.trees import *

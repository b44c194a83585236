# %% [markdown]
# # A first audit
#
# How much of what a client trains on can be read back from the update it sends? This program answers it twice: for a
# file of texts, and for one step of a training loop. Everything runs on this machine. The texts are invented.
#
# The notebook `first_audit.ipynb` is made of `first_audit.py`; change the latter.

# %%
import csv
from pathlib import Path

import gradaudit

MODEL = "minilm"  # real weights, from a package; your own folder or hub id works as well

ROWS = [
    ("Clara Berg refused insulin on 14 March.", "health"),
    ("Please wire Tobias 900 euros before Friday.", "money"),
    ("The biopsy of Mr. Okafor came back clean.", "health"),
    ("Our offer for the flat in Ghent was accepted.", "money"),
]
with open("messages.csv", "w", newline="", encoding="utf8") as file:
    csv.writer(file).writerows([("body", "topic"), *ROWS])

# %% [markdown]
# ## Audit the file
#
# A client trains a classifier on these four messages, dropout on, and sends one gradient. `auto` tries several attacks,
# the cheapest first.

# %%
result = gradaudit.run("messages.csv", text="body", label="topic", model=MODEL, out="results")
result

# %% [markdown]
# *Proven* sentences follow from the update alone. The frame shows each original beside what was read.

# %%
frame = result.to_frame()
frame[["original", "recovered", "certificate", "rougeL"]]

# %%
result.plot()

# %% [markdown]
# The report is one file. It hides the words unless you ask for them.

# %%
page = result.report("report.html")
print(page, Path(page).stat().st_size // 1000, "kB")

# %% [markdown]
# ## Audit one step of your own loop
#
# Put the step into `gradaudit.capture`. It writes a bundle: the model and what the client would send, not the batch.

# %%
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from gradaudit.models.packages import minilm_folder

FOLDER = str(minilm_folder())
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForSequenceClassification.from_pretrained(FOLDER, num_labels=2)
batch = tokenizer([text for text, _ in ROWS[:2]], padding=True, return_tensors="pt")

model.train()
with gradaudit.capture(model, "my-update", tokenizer=tokenizer):
    model(**batch, labels=torch.tensor([0, 1])).loss.backward()

# %%
found = gradaudit.attack("my-update", budget=60)
print(found)
print("\n".join(found.sentences))

# %% [markdown]
# ## What next
#
# The report says what to do next. To compare defenses: `gradaudit sweep`. To check updates before they are sent:
# `gradaudit gate`.

"""`fedveil predict` and `fedveil export`: a finished run's model in use."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedveil.atomic_files import write_atomically
from fedveil.cli.app import AsJson, DataDir, app, out

ResultArgument = Annotated[
    Path,
    typer.Argument(
        help="A result folder, such as results/demo/1a2b3c/seed-0, or results/demo where it is the only one."
    ),
]


@app.command(epilog="Example: fedveil predict results/patients/1a2b3c/seed-0 new.csv -o predicted.csv")
def predict(
    result: ResultArgument,
    file: Annotated[
        Path, typer.Argument(help="CSV or Parquet, pictures, .npz with an array x, or one text per line.")
    ],
    output: Annotated[Path, typer.Option("--out", "-o", help="Where the CSV file goes.")],
    data: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Apply a run's model to new examples and write a CSV file.

    It has the predicted class and the probability of each class, or the predicted number, or the probability of no
    event up to the end of each interval.

    Row n of the output belongs to row n of the input. The label column may be left out of the input.
    """
    from fedveil.prediction.trained import load_trained

    made = load_trained(result, data).predict(file, data)
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    rows = [[f"{value:.6g}" for value in row] for row in made.values.tolist()]
    if made.target == "classes":
        writer.writerow(["predicted", *made.columns])
        writer.writerows([name, *row] for name, row in zip(made.predicted, rows, strict=True))
    else:
        writer.writerow(made.columns)
        writer.writerows(rows)
    write_atomically(output, content.getvalue().encode())
    if as_json:
        print(json.dumps({"predictions": str(output), "rows": len(rows)}))
    else:
        out.print(f"{len(rows)} predictions in {output}", soft_wrap=True)


@app.command(epilog="Example: fedveil export results/patients/1a2b3c/seed-0 --format onnx -o model.onnx")
def export(
    result: ResultArgument,
    output: Annotated[Path, typer.Option("--out", "-o", help="Where the model goes.")],
    form: Annotated[
        Literal["torchscript", "onnx", "pytorch"],
        typer.Option("--format", help="torchscript, onnx or pytorch (weights)."),
    ] = "torchscript",
    data: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's model for other programs, with its preprocessing and its class names."""
    from fedveil.prediction.export import export as write_model
    from fedveil.prediction.trained import load_trained

    write_model(load_trained(result, data), form, output)
    if as_json:
        print(json.dumps({"model": str(output), "format": form}))
    else:
        out.print(f"model in {output}", soft_wrap=True)

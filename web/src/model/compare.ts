/** Finds the differences between the requests of several runs. Pure. */
import { jobSettings, type TrainingJob } from '../contract'

/** One setting that differs. `values` has one entry per run; undefined: the run does not set it. */
export interface Difference {
  name: string
  values: (string | undefined)[]
}

/**
 * Fields that are not compared as settings.
 *
 * Names always differ. Hyperparameters are compared separately. Environment variables may contain credentials, and
 * `Secrets` only names where values are stored. Tags do not affect training.
 */
const OMITTED: readonly string[] = ['TrainingJobName', 'HyperParameters', 'Environment', 'Secrets', 'Tags']

/** Fields that are not compared, because they contain a folder and every job has its own. */
const FOLDERS = ['S3Uri', 'S3OutputPath']

/** Return the hyperparameters that differ between runs, then the other settings that differ. */
export function differences(runs: readonly TrainingJob[]): Difference[] {
  const parameters = runs.map((run) => new Map(Object.entries(run.HyperParameters)))
  const settings = runs.map((run) => {
    const found = new Map<string, string>()
    for (const name of jobSettings) if (!OMITTED.includes(name)) flatten(name, run[name], found)
    return found
  })
  return [...differing(parameters), ...differing(settings)]
}

function differing(runs: readonly ReadonlyMap<string, string>[]): Difference[] {
  return [...new Set(runs.flatMap((run) => [...run.keys()]))]
    .map((name) => ({ name, values: runs.map((run) => run.get(name)) }))
    .filter(({ values }) => new Set(values).size > 1)
}

/** Add each value in a setting to `found`, by its path such as CheckpointConfig.EverySteps. */
function flatten(path: string, value: unknown, found: Map<string, string>): void {
  if (value === undefined || value === null || FOLDERS.includes(path.slice(path.lastIndexOf('.') + 1))) return
  if (typeof value !== 'object') found.set(path, String(value))
  else if (Array.isArray(value)) {
    if (value.length) found.set(path, JSON.stringify(value))
  } else for (const [name, each] of Object.entries(value)) flatten(`${path}.${name}`, each, found)
}

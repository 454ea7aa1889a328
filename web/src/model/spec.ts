/** Converts a job's request to YAML, a command line, Python and curl, and YAML to a request. Pure. */
import { parse, stringify } from 'yaml'

import { jobSettings, type CreateTrainingJobRequest, type TrainingJob } from '../contract'
import { shellWord } from './outputs'
import { SUBMIT } from '../words/submit'

export type Draft = Partial<CreateTrainingJobRequest>

/** Fields that are maps with keys of the user's choice. An empty value in such a map is meaningful and is kept. */
const MAPS = new Set(['HyperParameters', 'Environment', 'Secrets', 'Tags'])

const isEmptyObject = (value: unknown): boolean =>
  typeof value === 'object' && value !== null && !Array.isArray(value) && Object.keys(value).length === 0

function tidy(value: unknown, isMap = false): unknown {
  if (Array.isArray(value)) return value.map((each) => tidy(each))
  if (value === null || typeof value !== 'object') return value
  const kept = Object.entries(value)
    .map(([key, each]) => [key, tidy(each, MAPS.has(key))] as const)
    .filter(([, each]) => each !== undefined && (isMap || each !== '') && !isEmptyObject(each))
  return Object.fromEntries(kept)
}

/** Return the request without empty fields. */
export const shortest = (draft: Draft): Draft => tidy(draft) as Draft

/** Return the request that creates a job like this one. */
export function requestOf(job: TrainingJob): Draft {
  const run = `run=${job.RunId}/`
  const own = `/jobs/${job.TrainingJobName}/${run}`
  /** Return the URI that the user requested, without the folder that the service has added to it for this job. */
  const requested = (uri: string | undefined, place: string) =>
    uri?.endsWith(`/${place}`) ? uri.slice(0, -place.length) : uri && !uri.includes(own) ? uri : undefined
  return shortest({
    ...Object.fromEntries(jobSettings.map((name) => [name, job[name]])),
    AlternativeFleetNames: job.AlternativeFleetNames?.length ? job.AlternativeFleetNames : undefined,
    CheckpointConfig: {
      ...job.CheckpointConfig,
      S3Uri: requested(job.CheckpointConfig?.S3Uri, `${job.TrainingJobName}/`),
    },
    InputDataConfig: job.InputDataConfig?.length ? job.InputDataConfig : undefined,
    OutputDataConfig: { S3OutputPath: requested(job.OutputDataConfig?.S3OutputPath, `${job.TrainingJobName}/${run}`) },
    Preemptible: job.Preemptible || undefined,
  })
}

export const asYaml = (draft: Draft): string => stringify(shortest(draft), { lineWidth: 0 })

export class NotASpec extends Error {}

/** Read a request from YAML. Raises NotASpec with a sentence about the problem. */
export function fromYaml(text: string): Draft {
  let read: unknown
  try {
    read = parse(text, { maxAliasCount: 20 })
  } catch (error) {
    throw new NotASpec(error instanceof Error ? error.message.split('\n')[0]! : String(error))
  }
  if (read === null || read === undefined) return {}
  if (typeof read !== 'object' || Array.isArray(read)) throw new NotASpec(SUBMIT.yaml.problem)
  return read as Draft
}

/** Return the command of the AWS command line, which needs Everstep's model (`everstep configure`). */
export const asCommand = (draft: Draft): string =>
  `aws everstep create-training-job --cli-input-json ${shellWord(JSON.stringify(shortest(draft), null, 2))}`

export const asCurl = (draft: Draft): string =>
  [
    'curl --fail-with-body -X POST "$EVERSTEP_ENDPOINT_URL/v1/training-jobs"',
    '  -H "Authorization: Bearer $EVERSTEP_TOKEN" -H "Content-Type: application/json"',
    `  -d ${shellWord(JSON.stringify(shortest(draft), null, 2))}`,
  ].join(' \\\n')

function python(value: unknown, indent: string): string {
  if (value === true) return 'True'
  if (value === false) return 'False'
  if (Array.isArray(value)) return `[${value.map((each) => python(each, indent)).join(', ')}]`
  if (value !== null && typeof value === 'object') {
    const pairs = Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${python(each, indent)}`)
    return `{${pairs.join(', ')}}`
  }
  return JSON.stringify(value)
}

export const asPython = (draft: Draft): string => {
  const lines = Object.entries(shortest(draft)).map(([key, value]) => `    ${key}=${python(value, '    ')},`)
  return ['import everstep', '', 'client = everstep.client()', 'client.create_training_job(', ...lines, ')'].join('\n')
}

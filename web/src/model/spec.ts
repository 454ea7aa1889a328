/** A job's request, and the same as YAML, command line, Python and curl. Pure. */
import { parse, stringify } from 'yaml'

import { jobSettings, type CreateTrainingJobRequest, type TrainingJob } from '../contract'

export type Draft = Partial<CreateTrainingJobRequest>

/** Fields whose keys are the user's: an empty value says something there. */
const MAPS = new Set(['HyperParameters', 'Environment', 'Secrets', 'Tags'])

function tidy(value: unknown, isMap = false): unknown {
  if (Array.isArray(value)) return value.map((each) => tidy(each))
  if (value === null || typeof value !== 'object') return value
  const kept = Object.entries(value)
    .map(([key, each]) => [key, tidy(each, MAPS.has(key))] as const)
    .filter(([, each]) => each !== undefined && (isMap || each !== '') && !(typeof each === 'object' && each !== null && !Array.isArray(each) && Object.keys(each).length === 0))
  return Object.fromEntries(kept)
}

/** Without fields that are empty: the request as short as it can be. */
export const shortest = (draft: Draft): Draft => tidy(draft) as Draft

/** The request that makes a job like this one. */
export function requestOf(job: TrainingJob): Draft {
  const run = `run=${job.RunId}/`
  const own = `/jobs/${job.TrainingJobName}/${run}`
  /** Without the place of this job that the service has put below it. */
  const asked = (uri: string | undefined, place: string) =>
    uri?.endsWith(`/${place}`) ? uri.slice(0, -place.length) : uri && !uri.includes(own) ? uri : undefined
  return shortest({
    ...Object.fromEntries(jobSettings.map((name) => [name, job[name]])),
    AlternativeFleetNames: job.AlternativeFleetNames?.length ? job.AlternativeFleetNames : undefined,
    CheckpointConfig: { ...job.CheckpointConfig, S3Uri: asked(job.CheckpointConfig?.S3Uri, `${job.TrainingJobName}/`) },
    InputDataConfig: job.InputDataConfig?.length ? job.InputDataConfig : undefined,
    OutputDataConfig: { S3OutputPath: asked(job.OutputDataConfig?.S3OutputPath, `${job.TrainingJobName}/${run}`) },
    Preemptible: job.Preemptible || undefined,
  })
}

export const asYaml = (draft: Draft): string => stringify(shortest(draft), { lineWidth: 0 })

export class NotASpec extends Error {}

/** Read what somebody typed; a sentence says what is wrong with it. */
export function fromYaml(text: string): Draft {
  let read: unknown
  try {
    read = parse(text, { maxAliasCount: 20 })
  } catch (error) {
    throw new NotASpec(error instanceof Error ? error.message.split('\n')[0]! : String(error))
  }
  if (read === null || read === undefined) return {}
  if (typeof read !== 'object' || Array.isArray(read)) throw new NotASpec('The YAML is not a job. Write fields with values, such as TrainingJobName: my-job.')
  return read as Draft
}

const quoted = (text: string): string => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`)

/** AWS's own command line, with Everstep's model installed (`everstep configure`): it takes the request as it is. */
export const asCommand = (draft: Draft): string => `aws everstep create-training-job --cli-input-json ${quoted(JSON.stringify(shortest(draft), null, 2))}`

export const asCurl = (draft: Draft): string =>
  [
    'curl --fail-with-body -X POST "$EVERSTEP_ENDPOINT_URL/v1/training-jobs"',
    '  -H "Authorization: Bearer $EVERSTEP_TOKEN" -H "Content-Type: application/json"',
    `  -d ${quoted(JSON.stringify(shortest(draft), null, 2))}`,
  ].join(' \\\n')

function python(value: unknown, indent: string): string {
  if (value === true) return 'True'
  if (value === false) return 'False'
  if (Array.isArray(value)) return `[${value.map((each) => python(each, indent)).join(', ')}]`
  if (value !== null && typeof value === 'object') return `{${Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${python(each, indent)}`).join(', ')}}`
  return JSON.stringify(value)
}

export const asPython = (draft: Draft): string => {
  const lines = Object.entries(shortest(draft)).map(([key, value]) => `    ${key}=${python(value, '    ')},`)
  return ['import everstep', '', 'client = everstep.client()', 'client.create_training_job(', ...lines, ')'].join('\n')
}

/** Texts about a job's request as YAML. */
export const SPEC = {
  notASpec: 'The YAML is not a job. Write fields with values, such as TrainingJobName: my-job.',
} as const

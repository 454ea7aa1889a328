/** Submits a job: a form, and the same request as YAML. A change of one also changes the other. */
import '@mantine/core/styles/NumberInput.css'
import { Button, NativeSelect, NumberInput, Textarea, TextInput } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { useEffect, useRef, useState, type ChangeEvent } from 'react'
import { useNavigate, useSearchParams } from 'react-router'

import { ApiError, call } from '../api/client'
import { fleetsQuery, jobQuery, jobsQuery, useRole } from '../api/queries'
import type { CreateTrainingJobRequest, TrainingJobPlan } from '../contract'
import { planned } from '../model/plan'
import type { VerdictLine } from '../model/standing'
import { asCommand, asYaml, fromYaml, NotASpec, requestOf, shortest, type Draft } from '../model/spec'
import { hyperparametersOf, problems, withParity } from '../model/submit'
import { Command, Empty, FactList, Form, Problem } from '../parts/Basics'
import { Card } from '../parts/Card'
import { PageHead, Verdict } from '../parts/PageHead'
import { SUBMIT } from '../words/submit'

const EMPTY: Draft = {
  TrainingJobName: '',
  FleetName: '',
  Source: { SourceId: '' },
  EntryPoint: 'train.py',
  NodeCount: 2,
  RanksPerNode: 1,
  Protection: { Copies: 2 },
}

export default function SubmitPage() {
  useDocumentTitle('Submit, Everstep')
  const { mayRun } = useRole()
  if (mayRun) return <SubmitForm />
  return (
    <div className="stack">
      <PageHead title={SUBMIT.title} />
      <Empty {...SUBMIT.viewer} command="everstep jobs list" />
    </div>
  )
}

function SubmitForm() {
  const navigate = useNavigate()
  const client = useQueryClient()
  const jobs = useQuery({ ...jobsQuery, refetchInterval: false }).data ?? []
  const [draft, setDraft] = useState<Draft>(EMPTY)
  const [yaml, setYaml] = useState(asYaml(EMPTY))
  const [yamlError, setYamlError] = useState('')
  /** Typed text of the hyperparameters that has not been converted to the draft yet. */
  const [typed, setTyped] = useState<string>()
  const [isTried, setTried] = useState(false)
  const [touched, setTouched] = useState<ReadonlySet<string>>(new Set())
  const [plan, setPlan] = useState<TrainingJobPlan>()
  const [error, setError] = useState<unknown>()
  const [isBusy, setBusy] = useState(false)
  const [copied, setCopied] = useState('')
  const newest = useRef('')
  const found = problems(draft)

  const problemOf = (field: string): string | undefined => {
    const fields = error instanceof ApiError ? error.fields : []
    const refused = fields.find(({ Field }) => Field === field || Field.startsWith(`${field}.`))?.Message
    return refused ?? (isTried || touched.has(field) ? found[field] : undefined)
  }
  const settle = (next: Draft, fields: string[]) => {
    setDraft(next)
    setTyped(undefined)
    setPlan(undefined)
    setError(undefined)
    setTouched(new Set([...touched, ...fields]))
  }
  const replace = (next: Draft, fields: string[]) => {
    settle(next, fields)
    setYaml(asYaml(next))
    setYamlError('')
  }
  const change = (changes: Draft) => replace({ ...draft, ...changes }, Object.keys(changes))
  const write = (text: string) => {
    setYaml(text)
    try {
      const next = fromYaml(text)
      settle(next, Object.keys(next))
      setYamlError('')
    } catch (wrong) {
      if (!(wrong instanceof NotASpec)) throw wrong
      setYamlError(wrong.message)
    }
  }

  /**
   * Fill the form from a job. If `load` is called again before the answer, that answer is ignored.
   *
   * `address`: the job's name or RunId. `checkpoint`: step of the job's checkpoint from which the new job begins.
   */
  const load = (address: string, checkpoint?: number) => {
    newest.current = address
    client.fetchQuery(jobQuery(address)).then(
      (job) => {
        if (newest.current !== address) return
        const start = checkpoint === undefined ? {} : { InitialCheckpoint: { RunId: job.RunId, Step: checkpoint } }
        const request = { ...requestOf(job), ...start, TrainingJobName: '' }
        setCopied(job.TrainingJobName)
        replace({ ...EMPTY, ...request }, Object.keys(request))
      },
      (refused: unknown) => newest.current === address && setError(refused),
    )
  }
  const begin = (name: string) => {
    if (jobs.some((job) => job.TrainingJobName === name)) load(name)
    else newest.current = name
  }
  // A link to this page may name the job to clone, and one of its checkpoints.
  const [search] = useSearchParams()
  const [origin, step] = [search.get('from'), search.get('checkpoint')]
  useEffect(() => void (origin && load(origin, step === null ? undefined : Number(step))), [origin, step])

  const send = (isDry: boolean) => {
    setTried(true)
    setError(undefined)
    if (Object.keys(found).length || yamlError) return
    setBusy(true)
    call('CreateTrainingJob', { ...(shortest(draft) as CreateTrainingJobRequest), ...(isDry ? { DryRun: true } : {}) })
      .then((answer) => {
        if (isDry) return setPlan(answer.Plan)
        void client.invalidateQueries({ queryKey: ['jobs'] })
        const isAmbiguous = jobs.some((job) => job.TrainingJobName === answer.TrainingJobName) // job of another project
        void navigate(`/jobs/${encodeURIComponent(isAmbiguous ? answer.RunId! : answer.TrainingJobName)}`)
      }, setError)
      .finally(() => setBusy(false))
  }
  const wrong = isTried ? Object.entries(found) : []
  return (
    <Form className="stack" onSubmit={() => send(false)}>
      <PageHead title={SUBMIT.title} verdict={verdictOf(wrong.length, plan !== undefined)} />
      <div className="split">
        <Card label={SUBMIT.form}>
          <div className="stack">
            <CopyFrom names={jobs.map((job) => job.TrainingJobName)} copied={copied} onChange={begin} />
            <Fields draft={draft} problemOf={problemOf} onChange={change} />
            <Textarea
              label={SUBMIT.hyperparameters.label}
              description={SUBMIT.hyperparameters.text}
              autosize
              minRows={2}
              error={problemOf('HyperParameters')}
              value={typed ?? linesOf(draft.HyperParameters)}
              onChange={(event) => setTyped(event.currentTarget.value)}
              onBlur={() => typed !== undefined && change({ HyperParameters: hyperparametersOf(typed) })}
            />
          </div>
        </Card>
        <Card>
          <Textarea
            className="yaml"
            label={SUBMIT.yaml.label}
            description={SUBMIT.yaml.text}
            autosize
            minRows={18}
            maxRows={32}
            value={yaml}
            error={yamlError}
            onChange={(event) => write(event.currentTarget.value)}
            spellCheck={false}
          />
        </Card>
      </div>
      {error !== undefined && <Problem error={error} title={SUBMIT.failed} />}
      {wrong.length > 0 && (
        <p role="alert" className="dim">
          {wrong.map(([field, text]) => SUBMIT.problem(field, text)).join('; ')}.
        </p>
      )}
      <div className="row">
        <Button type="submit" loading={isBusy}>
          {SUBMIT.submit}
        </Button>
        <Button variant="default" disabled={isBusy} onClick={() => send(true)}>
          {SUBMIT.plan.button}
        </Button>
      </div>
      {plan && <Plan plan={plan} />}
      <details className="card">
        <summary>{SUBMIT.command}</summary>
        <Command text={asCommand(draft)} />
      </details>
    </Form>
  )
}

function verdictOf(wrongFields: number, isPlanned: boolean): VerdictLine {
  const words = SUBMIT.verdict
  if (wrongFields) return { tone: 'warn', ...words.wrong(wrongFields) }
  return isPlanned ? { tone: 'good', ...words.planned } : { tone: 'idle', ...words.start }
}

const linesOf = (parameters: Draft['HyperParameters']): string =>
  Object.entries(parameters ?? {})
    .map(([name, value]) => `${name}=${value}`)
    .join('\n')

interface CopyFromProps {
  names: readonly string[]
  /** Name of the job that the form was filled from. */
  copied: string
  onChange: (name: string) => void
}

function CopyFrom({ names, copied, onChange }: CopyFromProps) {
  const words = SUBMIT.begin
  return (
    <div>
      <TextInput
        label={words.label}
        description={copied ? words.copied(copied) : words.text}
        placeholder={words.placeholder}
        list="earlier-jobs"
        autoComplete="off"
        onChange={(event) => onChange(event.currentTarget.value)}
      />
      <datalist id="earlier-jobs">
        {[...new Set(names)].map((name) => (
          <option key={name} value={name} />
        ))}
      </datalist>
    </div>
  )
}

interface FieldsProps {
  draft: Draft
  problemOf: (field: string) => string | undefined
  onChange: (changes: Draft) => void
}

function Fields({ draft, problemOf, onChange }: FieldsProps) {
  const fleets = useQuery(fleetsQuery).data ?? []
  const { Protection, CheckpointConfig } = draft
  const fleetNames = fleets.map((fleet) => fleet.FleetName)
  const text = (field: keyof Draft, label: string, value: string | undefined, change: (typed: string) => Draft) => ({
    label,
    required: true,
    error: problemOf(field),
    value: value ?? '',
    onChange: (event: ChangeEvent<HTMLInputElement>) => onChange(change(event.currentTarget.value)),
    spellCheck: false,
  })
  const number = (label: string, value: number | undefined, change: (typed: number | undefined) => Draft) => ({
    label,
    min: 1,
    allowDecimal: false,
    value: value ?? '',
    onChange: (typed: number | string) => onChange(change(typed === '' ? undefined : Number(typed))),
  })
  return (
    <>
      <TextInput
        {...text('TrainingJobName', SUBMIT.name, draft.TrainingJobName, (typed) => ({ TrainingJobName: typed }))}
        autoComplete="off"
      />
      <NativeSelect
        label={SUBMIT.fleet.label}
        error={problemOf('FleetName')}
        data={[{ value: '', label: SUBMIT.fleet.only }, ...fleetNames]}
        value={draft.FleetName ?? ''}
        onChange={(event) => onChange({ FleetName: event.currentTarget.value })}
      />
      <TextInput
        {...text('Source', SUBMIT.source.label, draft.Source?.SourceId, (typed) => ({
          Source: { SourceId: typed.trim() },
        }))}
        description={SUBMIT.source.text}
        autoComplete="off"
      />
      <TextInput
        {...text('EntryPoint', SUBMIT.entryPoint.label, draft.EntryPoint, (typed) => ({ EntryPoint: typed }))}
        description={SUBMIT.entryPoint.text}
      />
      <div className="row numbers">
        <NumberInput
          {...number(SUBMIT.nodes, draft.NodeCount, (NodeCount) => ({ NodeCount }))}
          required
          error={problemOf('NodeCount')}
        />
        <NumberInput
          {...number(SUBMIT.ranks, draft.RanksPerNode, (RanksPerNode) => ({ RanksPerNode }))}
          error={problemOf('RanksPerNode')}
        />
        <NumberInput
          {...number(SUBMIT.copies, Protection?.Copies, (Copies) => ({ Protection: { ...Protection, Copies } }))}
          error={problemOf('Protection')}
        />
        <NumberInput
          {...number(SUBMIT.parity, Protection?.ParityGroupSize, (size) => ({
            Protection: withParity(Protection, size),
          }))}
          min={2}
          max={8}
        />
        <NumberInput
          {...number(SUBMIT.checkpoint.label, CheckpointConfig?.EverySteps, (EverySteps) => ({
            CheckpointConfig: { ...CheckpointConfig, EverySteps },
          }))}
          min={0}
          suffix={SUBMIT.checkpoint.suffix}
          error={problemOf('CheckpointConfig')}
        />
      </div>
    </>
  )
}

/** What the control plane would do with the job now. */
function Plan({ plan }: { plan: TrainingJobPlan }) {
  const { start, facts } = planned(plan)
  return (
    <section className="card" aria-label={SUBMIT.plan.label}>
      <h2>{SUBMIT.plan.title}</h2>
      <Verdict line={{ tone: start.tone, lead: `${start.title}.`, text: start.text }} />
      <div className="below">
        <FactList facts={facts} />
      </div>
    </section>
  )
}

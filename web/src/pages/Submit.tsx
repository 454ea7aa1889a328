/** Submit a job: a form and the same as YAML, each following the other. */
import { Button, NativeSelect, NumberInput, Textarea, TextInput } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { useEffect, useRef, useState } from 'react'
import { useNavigate, useSearchParams } from 'react-router'

import { ApiError, call } from '../api/client'
import { fleetsQuery, jobsQuery, jobQuery, useRole } from '../api/queries'
import type { CreateTrainingJobRequest, TrainingJobPlan } from '../contract'
import { planned } from '../model/plan'
import { asCommand, asYaml, fromYaml, NotASpec, requestOf, shortest, type Draft } from '../model/spec'
import { problems, withParity } from '../model/submit'
import { Command, Empty, FactList, Problem, ToneIcon } from '../parts/Basics'

const START: Draft = { TrainingJobName: '', FleetName: '', Source: { SourceId: '' }, EntryPoint: 'train.py', NodeCount: 2, RanksPerNode: 1, Protection: { Copies: 2 } }

export default function SubmitPage() {
  useDocumentTitle('Submit, Everstep')
  const { mayRun } = useRole()
  return mayRun ? (
    <Form />
  ) : (
    <div className="stack">
      <h1>Submit a job</h1>
    <Empty title="Your role may read, not submit" command="everstep jobs list">
      Ask an administrator for a token with the role submitter.
    </Empty>
    </div>
  )
}

function Form() {
  const navigate = useNavigate()
  const client = useQueryClient()
  const fleets = useQuery(fleetsQuery).data ?? []
  const jobs = useQuery({ ...jobsQuery, refetchInterval: false }).data ?? []
  const [draft, setDraft] = useState<Draft>(START)
  const [yaml, setYaml] = useState(asYaml(START))
  const [yamlError, setYamlError] = useState('')
  const [typed, setTyped] = useState<string>() // hyperparameters that are not in the draft yet
  const [isTried, setTried] = useState(false)
  const [touched, setTouched] = useState<ReadonlySet<string>>(new Set())
  const [plan, setPlan] = useState<TrainingJobPlan>()
  const [error, setError] = useState<unknown>()
  const [isBusy, setBusy] = useState(false)
  const [begun, setBegun] = useState('')
  const wanted = useRef('')
  const found = problems(draft)
  const said = (field: string) => {
    const refused = error instanceof ApiError ? error.fields.find((each) => each.Field === field || each.Field.startsWith(`${field}.`))?.Message : undefined
    return refused ?? (isTried || touched.has(field) ? found[field] : undefined)
  }
  const settled = (next: Draft, fields: string[]) => {
    setDraft(next)
    setTyped(undefined)
    setPlan(undefined)
    setError(undefined)
    setTouched(new Set([...touched, ...fields]))
  }
  const take = (next: Draft, fields: string[]) => {
    settled(next, fields)
    setYaml(asYaml(next))
    setYamlError('')
  }
  const change = (changes: Draft) => take({ ...draft, ...changes }, Object.keys(changes))
  /** Fill the form from a job. `address`: its name or RunId. Only the answer for the newest address counts. */
  const load = (address: string) => {
    wanted.current = address
    client.fetchQuery(jobQuery(address)).then(
      (job) => {
        if (wanted.current !== address) return
        const request = { ...requestOf(job), TrainingJobName: '' }
        setBegun(job.TrainingJobName)
        take({ ...START, ...request }, Object.keys(request))
      },
      (refused: unknown) => wanted.current === address && setError(refused),
    )
  }
  const begin = (name: string) => {
    if (jobs.some((job) => job.TrainingJobName === name)) load(name)
    else wanted.current = name
  }
  const [search] = useSearchParams()
  const origin = search.get('from')
  // A link to this page may name the job to clone.
  useEffect(() => void (origin && load(origin)), [origin])
  const write = (text: string) => {
    setYaml(text)
    try {
      const next = fromYaml(text)
      settled(next, Object.keys(next))
      setYamlError('')
    } catch (wrong) {
      if (!(wrong instanceof NotASpec)) throw wrong
      setYamlError(wrong.message)
    }
  }
  const send = (isDry: boolean) => {
    setTried(true)
    setError(undefined)
    if (Object.keys(found).length || yamlError) return
    setBusy(true)
    call('CreateTrainingJob', { ...(shortest(draft) as CreateTrainingJobRequest), ...(isDry ? { DryRun: true } : {}) })
      .then((answer) => {
        if (isDry) return setPlan(answer.Plan)
        void client.invalidateQueries({ queryKey: ['jobs'] })
        const isTaken = jobs.some((each) => each.TrainingJobName === answer.TrainingJobName) // by another project's job
        void navigate(`/jobs/${encodeURIComponent(isTaken ? answer.RunId! : answer.TrainingJobName)}`)
      }, setError)
      .finally(() => setBusy(false))
  }
  const number = (value: number | string) => (value === '' ? undefined : Number(value))
  return (
    <form
      className="stack"
      onSubmit={(event) => {
        event.preventDefault()
        send(false)
      }}
    >
      <h1>Submit a job</h1>
      <div className="split">
        <section className="card stack">
          <TextInput
            label="Begin with"
            description={begun ? `The code and settings of ${begun} are below, as far as they were not changed` : 'The code and settings of an earlier job; names are not used twice'}
            placeholder="an earlier job"
            list="earlier-jobs"
            autoComplete="off"
            onChange={(event) => begin(event.currentTarget.value)}
          />
          <datalist id="earlier-jobs">
            {jobs.map((job) => (
              <option key={job.RunId} value={job.TrainingJobName} />
            ))}
          </datalist>
          <TextInput label="Name" required error={said('TrainingJobName')} value={draft.TrainingJobName ?? ''} onChange={(event) => change({ TrainingJobName: event.currentTarget.value })} autoComplete="off" spellCheck={false} />
          <NativeSelect label="Fleet" error={said('FleetName')} data={[{ value: '', label: 'the only one there is' }, ...fleets.map((fleet) => fleet.FleetName)]} value={draft.FleetName ?? ''} onChange={(event) => change({ FleetName: event.currentTarget.value })} />
          <TextInput
            label="Source"
            required
            description="Id of an uploaded archive (SHA-256). The command line uploads a folder: everstep jobs submit"
            error={said('Source')}
            value={draft.Source?.SourceId ?? ''}
            onChange={(event) => change({ Source: { SourceId: event.currentTarget.value.trim() } })}
            autoComplete="off"
            spellCheck={false}
          />
          <TextInput label="Entry point" required description="A Python file in the source" error={said('EntryPoint')} value={draft.EntryPoint ?? ''} onChange={(event) => change({ EntryPoint: event.currentTarget.value })} spellCheck={false} />
          <div className="row" style={{ alignItems: 'flex-start' }}>
            <NumberInput label="Nodes" required w={110} min={1} allowDecimal={false} error={said('NodeCount')} value={draft.NodeCount ?? ''} onChange={(value) => change({ NodeCount: number(value) })} />
            <NumberInput label="Ranks a node" w={110} min={1} allowDecimal={false} error={said('RanksPerNode')} value={draft.RanksPerNode ?? ''} onChange={(value) => change({ RanksPerNode: number(value) })} />
            <NumberInput label="Copies" w={110} min={1} allowDecimal={false} error={said('Protection')} value={draft.Protection?.Copies ?? ''} onChange={(value) => change({ Protection: { ...draft.Protection, Copies: number(value) } })} />
            <NumberInput label="Parity group" w={120} min={2} max={8} allowDecimal={false} value={draft.Protection?.ParityGroupSize ?? ''} onChange={(value) => change({ Protection: withParity(draft.Protection, number(value)) })} />
            <NumberInput label="Checkpoint every" w={140} min={0} allowDecimal={false} suffix=" steps" error={said('CheckpointConfig')} value={draft.CheckpointConfig?.EverySteps ?? ''} onChange={(value) => change({ CheckpointConfig: { ...draft.CheckpointConfig, EverySteps: number(value) } })} />
          </div>
          <Textarea
            label="Hyperparameters"
            description="One a line: steps=200"
            autosize
            minRows={2}
            error={said('HyperParameters')}
            value={typed ?? Object.entries(draft.HyperParameters ?? {}).map(([key, value]) => `${key}=${value}`).join('\n')}
            onChange={(event) => setTyped(event.currentTarget.value)}
            onBlur={() =>
              typed !== undefined &&
              change({ HyperParameters: Object.fromEntries(typed.split('\n').filter((line) => line.includes('=')).map((line) => [line.slice(0, line.indexOf('=')).trim(), line.slice(line.indexOf('=') + 1).trim()])) })
            }
          />
        </section>
        <section className="card stack">
          <Textarea className="yaml" label="As YAML" description="Every field of CreateTrainingJob; the form follows" autosize minRows={18} maxRows={32} value={yaml} error={yamlError} onChange={(event) => write(event.currentTarget.value)} spellCheck={false} />
        </section>
      </div>
      {error !== undefined && <Problem error={error} title="It was not submitted" />}
      {isTried && Object.keys(found).length > 0 && <p role="alert" className="dim">{Object.entries(found).map(([field, text]) => `${field}: ${text}`).join('; ')}.</p>}
      <div className="row">
        <Button type="submit" loading={isBusy}>
          Submit
        </Button>
        <Button variant="default" disabled={isBusy} onClick={() => send(true)}>
          Show the plan
        </Button>
        <span className="dim">The plan checks everything and creates nothing.</span>
      </div>
      {plan && <Plan plan={plan} />}
      <details className="card">
        <summary>The same on the command line</summary>
        <Command text={asCommand(draft)} />
      </details>
    </form>
  )
}

/** What would become of the job. */
function Plan({ plan }: { plan: TrainingJobPlan }) {
  const { start, facts } = planned(plan)
  return (
    <section className={`card say tone-${start.tone}`} aria-label="The plan">
      <div className="q">What would become of it</div>
      <div className="a">
        <ToneIcon tone={start.tone} size={20} /> {start.title}
      </div>
      <p>{start.text}</p>
      <FactList facts={facts} />
    </section>
  )
}

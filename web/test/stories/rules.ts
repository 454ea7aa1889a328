/** Rules for the figures of all pages at one moment. Each rule returns its complaints, or an empty list if it holds. */
import type {
  DescribeProtectionResponse,
  Fleet,
  GetLogEventsResponse,
  GetMetricDataResponse,
  Incident,
  TrainingJob,
  TimeSpan,
  TrainingJobNode,
} from '../../src/contract'
import { plain } from '../../src/model/ansi'
import { formatted } from '../../src/model/figures'
import { buckets } from '../../src/model/time'
import { timeline } from '../../src/model/timeline'
import { listed, type Moment } from './moment'

export interface Shown {
  page: string
  figure: string
  of: string
  value: string
  tone?: string
  text: string
}

/** All elements of a page that show a figure. */
export const figuresOn = (page: HTMLElement, address: string): Shown[] =>
  [...page.querySelectorAll<HTMLElement>('[data-figure][data-of]')].map((element) => ({
    page: address,
    figure: element.dataset.figure!,
    of: element.dataset.of ?? '',
    value: element.dataset.value ?? '',
    tone: element.dataset.tone,
    text: [element.textContent, element.getAttribute('aria-label'), element.title].filter(Boolean).join(' '),
  }))

const told = ({ page, figure, of, value, text }: Shown) =>
  `${figure} of ${of} is '${value}' on ${page} (“${text.slice(0, 80)}”)`

/** Equal figures of one object have equal values and tones, on one page and across pages. */
export function agree(shown: readonly Shown[]): string[] {
  const first = new Map<string, Shown>()
  const wrong: string[] = []
  for (const each of shown) {
    const key = `${each.of} ${each.figure}`
    const other = first.get(key)
    if (other === undefined) first.set(key, each)
    else if (other.value !== each.value) wrong.push(`${told(each)}, but ${told(other)}`)
    else if (other.tone !== each.tone) wrong.push(`${told(each)} is ${each.tone}, but ${told(other)} is ${other.tone}`)
  }
  return wrong
}

/** The text of a figure contains its value. A figure without a value contains no number. */
export const readable = (shown: readonly Shown[]): string[] =>
  shown
    .filter(({ figure, value, text }) => {
      if (value === '') return /\d/.test(text)
      const isNumber = value.trim() !== '' && Number.isFinite(Number(value))
      return !text.includes(isNumber ? formatted(figure, Number(value)) : value)
    })
    .map((each) => `the text lacks the value: ${told(each)}`)

const NONSENSE = /\b(?:undefined|NaN|Infinity|null)\b|\[object |Invalid Date/
const READ = ['title', 'aria-label', 'href', 'data-value', 'data-of']

/** No text and no attribute contains the name of a missing value, such as `undefined` or `NaN`. */
export function sensible(page: HTMLElement, address: string): string[] {
  const elements = [...page.querySelectorAll('*')]
  const texts = elements.flatMap((element) => READ.map((name) => element.getAttribute(name) ?? ''))
  const found = [page.textContent ?? '', ...texts].map((text) => NONSENSE.exec(text)).filter((each) => each !== null)
  const around = ({ input, index }: RegExpExecArray) => input.slice(Math.max(0, index - 40), index + 40)
  return found.map((match) => `nonsense on ${address}: “${around(match)}”`)
}

/** A page whose answers are old has no green figure, and its frame turns every color into grey. */
export function grey(page: HTMLElement, address: string): string[] {
  const green = [...page.querySelectorAll<HTMLElement>('[data-of][data-tone="good"]')]
  const wrong = green.map((element) => `green on a stale page: “${element.textContent?.slice(0, 60)}” on ${address}`)
  return page.querySelector('.app.is-stale') ? wrong : [...wrong, `the frame of the stale page ${address} has colors`]
}

const SECONDS = 0.05
const PHASES = ['unaccounted', 'detect', 'replace', 'restore', 'rework'] as const

/** The phases that a page shows of an incident add up to its total. */
export function addUp(shown: readonly Shown[]): string[] {
  const wrong: string[] = []
  for (const total of shown.filter((each) => each.figure === 'total-seconds')) {
    const here = shown.filter((each) => each.of === total.of && each.page === total.page)
    const phases = here.filter((each) => PHASES.some((phase) => each.figure === `${phase}-seconds`))
    const lengths = new Map(phases.map((each) => [each.figure, Number(each.value)]))
    const sum = [...lengths.values()].reduce((a, b) => a + b, 0)
    const isSame = Math.abs(sum - Number(total.value)) <= SECONDS
    if (phases.length && !isSame) wrong.push(`the phases add up to ${sum}: ${told(total)}`)
  }
  return wrong
}

interface Answers {
  job: TrainingJob
  protection: DescribeProtectionResponse
  nodes: TrainingJobNode[]
  spans: TimeSpan[]
  incidents: Incident[]
}
/** Complains about a figure unless the claim holds. */
type Claim = (each: Shown, holds: boolean, why: string) => unknown

function answersOf(moment: Moment): Answers[] {
  const { jobs, incidents } = listed(moment)
  return jobs.map(({ TrainingJobName: name, RunId }) => ({
    job: moment.answers[`GET /v1/training-jobs/${name}`] as TrainingJob,
    protection: moment.answers[`GET /v1/training-jobs/${name}/protection`] as DescribeProtectionResponse,
    nodes: (moment.answers[`GET /v1/training-jobs/${name}/nodes`] as { Nodes: TrainingJobNode[] }).Nodes,
    spans: (moment.answers[`GET /v1/training-jobs/${name}/time-spans`] as { TimeSpans: TimeSpan[] }).TimeSpans,
    incidents: incidents.filter((each) => each.RunId === RunId),
  }))
}

const ENDED = ['Completed', 'Failed', 'Stopped']

/** Figures and green tones agree with the API's answers, from which this file derives them without the application. */
export function supported(shown: readonly Shown[], moment: Moment): string[] {
  const jobs = new Map(answersOf(moment).map((each) => [`job/${each.job.RunId}`, each]))
  const { nodes, incidents } = listed(moment)
  const fleets = (moment.answers['GET /v1/fleets'] as { Fleets: Fleet[] }).Fleets
  const wrong: string[] = []
  const claim: Claim = (each, holds, why) => holds || wrong.push(`${why}: ${told(each)}`)
  for (const each of shown) {
    const isGreen = each.tone === 'good'
    const about = jobs.get(each.of)
    if (about) ofJob(each, isGreen, about, claim)
    const node = nodes.find(({ NodeId }) => each.of === `node/${NodeId}`)
    const isWorking = node?.NodeStatus === 'assigned' && node.Connected
    if (node && isGreen && each.figure === 'status') claim(each, isWorking, 'green without a working node')
    if (node?.EndTime !== undefined) claim(each, each.value === 'gone' || each.value === '', 'an ended node works')
    const incident = incidents.find(({ IncidentId }) => each.of === `incident/${IncidentId}`)
    if (incident) ofIncident(each, incident, moment.now, claim)
    const fleet = fleets.find(({ FleetName }) => each.of === `fleet/${FleetName}`)
    const isWhole = fleet?.FleetStatus === 'active' && fleet.ConnectedNodeCount >= fleet.DesiredNodeCount
    if (fleet && isGreen) claim(each, isWhole, 'green without its nodes')
  }
  return wrong
}

function ofJob(each: Shown, isGreen: boolean, { job, protection, incidents }: Answers, claim: Claim) {
  const isOver = ENDED.includes(job.TrainingJobStatus)
  const number = Number(each.value)
  const isWhole = job.HealthyNodeCount >= job.GenerationNodeCount
  const odds = protection.RecoveryOdds?.find((other) => other.LostNodes === 1)?.Probability ?? 1
  const isTraining = job.SecondaryStatus === 'Training' && job.TrainingJobStatus === 'InProgress'
  const isProtected = !isOver && protection.ProtectionState === 'Protected' && isWhole
  const isSafe = isProtected && odds >= 1
  const mayHide = isOver || job.CommittedStep < 0 || !job.AssignedNodeCount || job.SecondaryStatus !== 'Training'
  switch (each.figure) {
    case 'status':
    case 'moving':
      if (isGreen) claim(each, isTraining || job.TrainingJobStatus === 'Completed', 'green without training')
      break
    case 'protection':
    case 'safe':
      if (isGreen) claim(each, isSafe, 'green without protection')
      if (each.value === 'Protected') claim(each, isProtected, 'not protected')
      break
    case 'act':
      if (isGreen && !isOver) claim(each, isTraining && isSafe, 'nothing to do, but not green')
      break
    case 'committed-step':
      if (each.value === '') claim(each, mayHide, 'a committed step is hidden')
      else claim(each, !isOver && number === job.CommittedStep && number <= job.MaxBoundary, 'not committed')
      break
    case 'step':
      claim(each, each.value === '' ? job.Boundary < 0 : number === job.Boundary, 'another step')
      claim(each, isOver || job.CommittedStep <= job.Boundary, 'committed beyond the step')
      break
    case 'checkpoint-step':
      claim(each, each.value === String(protection.LastCheckpoint?.Step ?? ''), 'another checkpoint')
      break
    case 'healthy-nodes':
      if (each.value !== '') claim(each, number === job.HealthyNodeCount, 'other nodes are healthy')
      break
    case 'incidents':
      claim(each, number === incidents.length, `${incidents.length} incidents are listed`)
      break
    case 'open-incidents':
      claim(each, number === incidents.filter((other) => !other.ClosedAt).length, 'other incidents are open')
      break
    case 'recomputed-steps': {
      const sum = incidents.reduce((total, other) => total + (other.LostSteps ?? 0), 0)
      claim(each, number === sum, `the incidents add up to ${sum}`)
    }
  }
}

function ofIncident(each: Shown, incident: Incident, now: number, claim: Claim) {
  const [phase, kind] = each.figure.split('-')
  const isNear = (seconds: number) => Math.abs(Number(each.value) - seconds) <= SAME_SECONDS
  if (kind === 'seconds' && PHASES.includes(phase as never)) {
    const seconds = lengthOf(incident, phase as (typeof PHASES)[number], now)
    claim(each, isNear(Math.max(0, seconds)), `the phase takes ${seconds} s`)
  }
  if (each.figure === 'total-seconds')
    claim(each, isNear((incident.ClosedAt ?? now) - incident.FailedAt), 'another total')
  const repeated = String(incident.LostSteps ?? '')
  if (each.figure === 'recomputed-steps') claim(each, each.value === repeated, 'other steps are repeated')
  if (each.figure === 'cost-usd') claim(each, each.value === String(incident.CostUsd ?? ''), 'another cost')
}

/** Difference in seconds that the rules accept, because pages round the time down to whole seconds. */
const SAME_SECONDS = 1

/** The job's time by bucket agrees with its spans and incidents, and adds up to the whole time of the job. */
export function accounted(moment: Moment): string[] {
  const wrong: string[] = []
  for (const { job, incidents, spans } of answersOf(moment)) {
    for (const [bucket, seconds] of Object.entries(job.AccountingSeconds)) {
      // A span can have both `train` and `shortage`. Recordings from before the spans have none.
      if (bucket === 'train' || bucket === 'shortage' || !spans.length) continue
      const own = spans.filter((each) => each.Bucket === bucket)
      const drawn = own.reduce((sum, each) => sum + (each.EndTime ?? job.AccountedUntil!) - each.StartTime, 0)
      if (Math.abs(drawn - seconds) > 0.001)
        wrong.push(`${job.TrainingJobName}: ${bucket} took ${seconds} s, and its spans ${drawn} s`)
    }
    const absent = incidents.reduce((sum, each) => sum + lengthOf(each, 'unaccounted', moment.now), 0)
    let unaccounted = (job.AccountingSeconds['unaccounted'] ?? 0) - absent
    if (unaccounted < -SAME_SECONDS)
      wrong.push(`${job.TrainingJobName}: its incidents had no control plane for ${-unaccounted} s more than the job`)
    const open = incidents.find((each) => each.ClosedAt === undefined)
    const found = buckets(job, moment.now, open)
    const sum = found.buckets.reduce((total, each) => total + each.seconds, 0)
    const life = (job.TrainingEndTime ?? moment.now) - job.CreationTime
    if (Math.abs(sum - life) > SAME_SECONDS)
      wrong.push(`${job.TrainingJobName}: the time adds up to ${sum} s of ${life} s`)
    for (const phase of PHASES.slice(1)) {
      const of = (each: Incident) => lengthOf(each, phase, moment.now)
      const wanted = incidents.reduce((total, each) => total + of(each), 0)
      const counted = found.buckets.find((each) => each.name === phase)?.seconds ?? 0
      const isMore = phase === 'restore' && counted > wanted // launches after a pause count as restore, too
      if (Math.abs(counted - wanted) <= SAME_SECONDS || isMore) continue
      // Detection and replacement stand still while no control plane runs.
      unaccounted -= ['detect', 'replace'].includes(phase) ? wanted - counted : Infinity
      if (counted < wanted && unaccounted >= -SAME_SECONDS) continue
      wrong.push(`${job.TrainingJobName}: ${phase} took ${counted} s by the job and ${wanted} s by its incidents`)
    }
  }
  return wrong
}

/** Return a phase's length from the API's times. An open phase lasts from the end of the previous phase until now. */
function lengthOf(incident: Incident, phase: (typeof PHASES)[number], now: number): number {
  const whole = incident.DetectSeconds ?? incident.OpenedAt - incident.FailedAt
  const absent = Math.min(whole, incident.ControlPlaneAbsentSeconds ?? 0)
  const { ReplaceSeconds = 0, RestoreSeconds = 0, ReworkSeconds = 0 } = incident
  const spent = [absent, whole - absent, ReplaceSeconds, RestoreSeconds, ReworkSeconds]
  const index = PHASES.indexOf(phase)
  if (incident.ClosedAt !== undefined) return spent[index]!
  const open = PHASES.indexOf(incident.Phase as typeof phase)
  if (index !== open) return index < open ? spent[index]! : 0
  return now - incident.FailedAt - spent.slice(0, index).reduce((a, b) => a + b, 0)
}

/** On the timeline, no lost node works after its failure, and no node works after the job's end. */
export function buried(moment: Moment): string[] {
  const wrong: string[] = []
  for (const { job, incidents, nodes } of answersOf(moment)) {
    const { lanes } = timeline(job, incidents, [], nodes, moment.now, Infinity)
    for (const lane of lanes.filter((each) => each.id.startsWith('i-'))) {
      for (const span of lane.spans) {
        const within = (at: number) => at > span.from && at < span.to - SECONDS
        const lost = incidents.find((each) => each.InstanceIds.includes(lane.id) && within(each.FailedAt))
        if (lost) wrong.push(`${lane.id} works after incident ${lost.IncidentId} lost it`)
        if (span.to > (job.TrainingEndTime ?? Infinity) + SECONDS) wrong.push(`${lane.id} works for an ended job`)
      }
    }
  }
  return wrong
}

/** The cause of drills. A report counts their incidents separately from failures. */
const DRILL = 'drill'

/** The figures of a report follow from all incidents and jobs of a story: its range is longer than any story. */
export function reported(page: HTMLElement, moment: Moment): string[] {
  const { incidents } = listed(moment)
  const real = incidents.filter((each) => each.Cause !== DRILL)
  const recomputed = real.reduce((sum, each) => sum + (each.LostSteps ?? 0), 0)
  const trained = answersOf(moment).reduce((sum, { job }) => sum + (job.AccountingSeconds?.['train'] ?? 0), 0)
  const text = (name: string) => page.querySelector(`[data-figure="report-${name}"]`)?.firstChild?.textContent ?? ''
  const wrong: string[] = []
  if (!page.querySelector('[data-figure^="report-"]')) return incidents.length ? ['the report is empty'] : []
  const shown = Number(text('recomputed-steps').replace(/,/g, ''))
  if (shown !== recomputed) wrong.push(`the report has ${shown} recomputed steps, and the incidents ${recomputed}`)
  const ettr = text('ettr')
  if ((ettr === '0 %' || ettr === '–') && trained > 60) wrong.push(`ETTR is '${ettr}' after ${trained} s of training`)
  return wrong
}

/** The Logs tab shows every line of the job's log, and no other line. */
export function printedLines(page: HTMLElement, moment: Moment, job: string): string[] {
  const answer = moment.answers[`GET /v1/training-jobs/${job}/logs/events`] as GetLogEventsResponse | undefined
  const texts = (answer?.Events ?? []).map((each) => plain(each.Message))
  const shown = [...page.querySelectorAll<HTMLElement>('[role=log] .line')].map((line) => line.textContent ?? '')
  if (!texts.length) return shown.length ? [`${job}: lines without a log`] : []
  const unknown = shown.filter((line) => !texts.some((text) => line.includes(text)))
  const wrong = unknown.map((line) => `${job}: “${line.slice(0, 80)}” is no line of the log`)
  if (shown.length !== texts.length) wrong.push(`${job}: ${shown.length} of ${texts.length} lines are shown`)
  return wrong
}

/** The Metrics tab has a chart for each metric. */
export function charted(page: HTMLElement, moment: Moment, job: string): string[] {
  const answer = moment.answers[`GET /v1/training-jobs/${job}/metric-data`] as GetMetricDataResponse | undefined
  const names = (answer?.MetricDataResults ?? []).map((each) => each.MetricName)
  const charts = page.querySelectorAll('.card.chart').length
  return charts === names.length ? [] : [`${job}: ${charts} charts for the metrics ${names.join(', ')}`]
}

/** Returns a complaint for each step number on a page that no current answer contains. Durations are not steps. */
export function mentioned(page: HTMLElement, address: string, known: ReadonlySet<string>): string[] {
  // The text of the next element can follow without a space: `23 sTimeline`.
  const steps = /\b[Ss]teps? (\d[\d,]*)(?!\d|[\d,.]* (?:s|min|h|d)(?![a-z]))/g
  const matches = [...(page.textContent ?? '').matchAll(steps)]
  const numbers = new Set(matches.map(([, number]) => number!.replace(/,/g, '')))
  const unknown = [...numbers].filter((number) => !known.has(number))
  return unknown.map((number) => `step ${number} on ${address} is in no answer`)
}

export const numbersIn = (moment: Moment): Set<string> => new Set(JSON.stringify(moment.answers).match(/\d+/g))

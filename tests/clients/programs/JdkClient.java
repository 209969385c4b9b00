import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** The JDK's HTTP client with its default settings, on which Spring AI and LangChain4j build: it offers HTTP/2. */
public class JdkClient {
    public static void main(String[] arguments) throws Exception {
        String base = arguments[0], model = arguments[1], messages = arguments[3];
        HttpClient client = HttpClient.newHttpClient();
        String body = "{\"model\":\"" + model + "\",\"max_tokens\":4,\"messages\":" + messages + "}";
        StringBuilder statuses = new StringBuilder();
        for (int turn = 0; turn < 2; turn++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(base + "/v1/chat/completions"))
                .header("Content-Type", "application/json").POST(HttpRequest.BodyPublishers.ofString(body)).build();
            HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
            boolean whole = answer.body().contains("\"choices\"");
            statuses.append(turn == 0 ? "" : ",").append(whole ? answer.statusCode() : -answer.statusCode());
        }
        System.out.println("{\"statuses\":[" + statuses + "]}");
    }
}
